"""Judgement: pure functions over records. Nothing here measures, prints or writes."""
