"""One reader of KV layouts per family of config field names."""
