"""The training programs: command lines, data and files. They contain no mathematics."""
