"""Costs of language models: labelled texts, and a cost head that is fitted to them."""
