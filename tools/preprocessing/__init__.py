"""Parts of ``tools/preprocess_data.py``, which turns text into Megatron's indexed datasets.

Only :mod:`tools.preprocessing.dataset_output` imports the base package, and with it torch; what the
worker processes import stays free of both, so that they start in a fraction of a second.
"""
