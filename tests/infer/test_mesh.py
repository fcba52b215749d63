"""--mesh: eight devices write the files that one writes, and a step table is about its mesh."""

import json

import jax
import pytest

from dspark_jax.sharding import make_mesh, mesh_of
from infer import profile

MESH = "data=4,model=2"
FULL = {"slots": 4, "policy": "fixed", "policy_length": 7}


@pytest.fixture
def options(tmp_path, models, prompts) -> dict:
    return {**models, "prompts": prompts, "output": tmp_path / "out.jsonl", "max_new_tokens": 10}


@pytest.fixture
def one_device(infer, tmp_path, options):
    """The bytes that `generate` writes without a mesh."""

    def run(**more) -> bytes:
        output = tmp_path / "one.jsonl"
        outcome = infer("generate", **options | {"output": output} | more)
        assert outcome.code == 0, outcome.error
        return output.read_bytes()

    return run


@pytest.mark.slow
def test_generate(infer, options, one_device):
    outcome = infer("generate", **options, mesh=MESH)
    assert outcome.code == 0, outcome.error
    assert options["output"].read_bytes() == one_device()
    assert jax.sharding.get_abstract_mesh().empty


def test_batch(infer, options, one_device):
    outcome = infer("batch", **options, **FULL, mesh=MESH)
    assert outcome.code == 0, outcome.error
    assert options["output"].read_bytes() == one_device()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=8", "model=8", "model=2,data=4"])
def test_every_mesh_and_sampling(infer, options, one_device, mesh):
    """Eight model shards do not divide four heads, which then stay whole."""
    sampling = {"temperature": 1.0, "top_p": 0.9, "seed": 4, "tree": "pctree", "tree_budget": 6}
    outcome = infer("generate", **options, **sampling, mesh=mesh)
    assert outcome.code == 0, outcome.error
    expected = one_device(**sampling)
    assert options["output"].read_bytes() == expected
    options["output"].unlink()
    outcome = infer("batch", **options, **sampling, slots=3, policy="threshold", policy_threshold=0.0, mesh=mesh)
    assert outcome.code == 0, outcome.error
    found = [json.loads(line)["output_ids"] for line in options["output"].read_text().splitlines()]
    assert found == [json.loads(line)["output_ids"] for line in expected.decode().splitlines()]


@pytest.mark.slow
def test_stop_strings_go_through_chunks(infer, options, one_device, chat_target):
    more = {"target": chat_target, "stop": "e"}
    outcome = infer("generate", **options | more, mesh=MESH)
    assert outcome.code == 0, outcome.error
    assert options["output"].read_bytes() == one_device(**more)


@pytest.mark.slow
def test_an_evaluation(infer, options):
    output = options["output"].with_suffix(".json")
    more = {"output": output, "max_new_tokens": 6, "repeats": 1, "batch_size": 4, "compare": ("chain", "pctree")}
    outcome = infer("evaluate", **options | more, mesh=MESH)
    assert outcome.code == 0, outcome.error
    report = json.loads(output.read_text())
    assert report["law"]["mesh"] == MESH and report["law"]["device"].startswith("8 x ")
    assert all(result["identical_outputs"] == result["requests"] == 4 for result in report["results"][:2])


@pytest.mark.slow
def test_a_step_table_is_about_its_mesh(infer, tmp_path, options, one_device, monkeypatch):
    monkeypatch.setattr(profile, "_BANDWIDTH_BYTES", 2**20)
    monkeypatch.setattr(profile, "_WIDTHS", (1, 8))
    models, output = {name: options[name] for name in ("target", "drafter")}, tmp_path / "profile.json"
    outcome = infer("profile", **models, output=output, context=20, steps=4, repeats=1, slots=4, mesh=MESH)
    assert outcome.code == 0, outcome.error
    table = tmp_path / "profile_steps.json"
    assert json.loads(output.read_text())["mesh"] == json.loads(table.read_text())["law"]["mesh"] == MESH
    for mesh, name in ((None, "data=1,model=1"), ("data=2,model=4", "data=2,model=4")):
        other = {} if mesh is None else {"mesh": mesh}
        outcome = infer("batch", **options, slots=4, table=table, **other)
        assert outcome.code == 2
        assert f"{table}: law.mesh: the table is about {MESH}, not {name}; measure again" in outcome.error_line
    outcome = infer("batch", **options, slots=4, table=table, mesh=MESH)
    assert outcome.code == 0, outcome.error
    found = [json.loads(line)["output_ids"] for line in options["output"].read_text().splitlines()]
    assert found == [json.loads(line)["output_ids"] for line in one_device().decode().splitlines()]


@pytest.mark.parametrize("command", ["generate", "batch", "evaluate", "profile"])
@pytest.mark.parametrize(
    ("mesh", "named"),
    [
        ("data=4", "--mesh data=4: is about 4 devices, but there are 8"),
        ("data=999999999,model=999999999", "devices, but there are 8"),
        ("data=4,modle=2", "--mesh data=4,modle=2: 'modle=2' is no axis and its size; write it as data=2,model=2"),
        ("data=8,data=1", "'data=1' is no axis"),
        ("data=-8", "'data=-8'"),
        ("data=0", "'data=0'"),
        ("data=2.0", "'data=2.0'"),
        ("data", "'data'"),
        ("8", "'8'"),
        ("", "''"),
    ],
)
def test_bad_meshes(infer, models, options, tmp_path, command, mesh, named):
    given = options if command != "profile" else models | {"output": tmp_path / "profile.json"}
    outcome = infer(command, *(f"--mesh={mesh}",), **given)
    assert outcome.code == 2 and named in outcome.error_line


def test_the_mesh_of_an_array():
    mesh = make_mesh(2, 4)
    placed = jax.device_put(jax.numpy.zeros(8), jax.NamedSharding(mesh, jax.P("data")))
    assert mesh_of(placed) == "data=2,model=4"
    assert mesh_of(jax.numpy.zeros(8)) == "data=1,model=1"
