"""Long listings: rows that are alike in one row, with the set of their names and how many they are."""
