"""What answers messages: one file for each family of them."""
