"""Five small environments for experiments: one try, and an explanation that comes too late. See README.md."""
