"""Who has how much, who may have more, and whose turn it is: for all that clients and peers share."""
