"""Commands that measure: a room of files, not a group that is typed."""
