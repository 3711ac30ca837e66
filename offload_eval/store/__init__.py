"""The only reader and writer of experiment files and record files."""
