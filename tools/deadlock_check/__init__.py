"""Decides whether a pipeline configuration can hang under PyTorch's and NCCL's rules, and says why.

Three parts, each usable alone: *record* what the ranks issue (``record_schedule``,
``record_processes``), *model* how it would run (``model``), *explain* the outcome (``explain``,
``plot``). They share ``trace`` and ``outcome``, which are plain data.
"""
