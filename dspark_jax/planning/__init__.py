"""What a program will take on chips that are not here: memory, arithmetic, traffic and time, without running it."""
