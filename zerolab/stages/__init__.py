"""The four stages, one file each, one screen each: WHAT is sharded. The engine decides when.

Read stage0.py, then diff each against the next: ``diff zerolab/stages/stage1.py zerolab/stages/stage2.py`` is
the lesson. hybrid.py is stage3.py with a second group of ranks.
"""
