"""What is behind each code that an operator meets, as data: `kvctl explain` and docs/codes.md are made of it."""
