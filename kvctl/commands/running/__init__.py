"""Commands about what running engines hold of each other: a room of files, not a group that is typed."""
