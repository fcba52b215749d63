"""The inference programs: `python -m infer generate | batch | evaluate | profile | tree-cost`."""
