"""Engines that are borrowed: what a lender serves, and what is left of its device."""
