"""Building blocks shared by targets and drafters: pure functions over small parameter trees."""
