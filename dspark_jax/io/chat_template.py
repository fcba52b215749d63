"""Chat templates, rendered as Hugging Face's tokenizers render them."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from dspark_jax.io.errors import InputError


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` only marks text in Hugging Face's templates; here it is its body."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment.from_string(source)


def render(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool,
    enable_thinking: bool | None = None,
) -> str:
    """The text of a conversation. `enable_thinking` reaches the template only when it is not None.

    Raises:
      InputError: the template is malformed or refuses these messages.
    """
    options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    present = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        text = _compile(source).render(
            messages=present,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special_tokens,
            **options,
        )
        text.encode()  # half of a surrogate pair is no text
    except Exception as error:  # a template's code can raise anything
        raise InputError(f"chat template: {error}") from error
    return text
