"""The inference programs: `python -m infer generate | batch | evaluate | profile | simulate | tree-cost`."""
