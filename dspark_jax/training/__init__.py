"""Training a drafter against a frozen target: anchors, losses and the train step."""
