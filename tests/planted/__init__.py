"""Faults that other trainers have shipped, planted in a copy of this one: does a test of `make test` catch each?"""
