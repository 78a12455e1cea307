"""What an owner of a serving job lends of its GPU, and to whom: the record, the lender process, the page they share."""
