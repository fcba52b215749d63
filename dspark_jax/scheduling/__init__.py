"""How much of a round's drafts is worth verifying."""
