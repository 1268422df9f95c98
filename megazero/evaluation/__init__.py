"""Scoring a model: loss and perplexity of documents, log-likelihoods of continuations, the adapter for the LM
Evaluation Harness.
"""
