"""What is said where something is wrong: what is behind a code, and what a bundle holds."""
