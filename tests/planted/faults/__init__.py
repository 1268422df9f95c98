"""The faults that are planted, a table for each part of the house."""
