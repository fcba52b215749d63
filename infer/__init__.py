"""The inference programs: `python -m infer generate | evaluate | profile | simulate | tree-cost`."""
