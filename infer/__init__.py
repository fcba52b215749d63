"""The inference programs: `python -m infer generate | batch | evaluate | profile | load | simulate | tree-cost`."""
