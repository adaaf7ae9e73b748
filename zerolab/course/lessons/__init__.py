"""The lessons, a package for each, named as its notebook without the number.

``figures`` draws, ``check`` grades the exercise, ``quiz`` explains the answers to what the lesson asks. The
package itself exports the check, which also runs in worker processes; a notebook imports the others from it.
"""
