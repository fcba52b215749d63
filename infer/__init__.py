"""The inference programs: `python -m infer generate | evaluate | profile | tree-cost`."""
