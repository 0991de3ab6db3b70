"""The checks of `kvctl doctor`, one file for each part; each gives its checks in the order in which they are shown."""
