"""How much of each request's draft to verify, and what its confidences are worth."""
