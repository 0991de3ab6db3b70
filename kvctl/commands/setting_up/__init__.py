"""Commands of somebody who sets a host up: a room of files, not a group that is typed."""
