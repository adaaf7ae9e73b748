"""Grade and hand out the lessons, and keep a reader's own record of them.

``./zero grade`` runs notebooks that were handed in and checks them again (grade.py, and grading.py, which
says what it believes). ``./zero handout`` writes lessons without outputs and answers (handout.py). ``./zero
progress`` shows what a reader has done on this machine (record.py).
"""
