"""What several tests need: reference trainings, models, faults, and hosts.

Each module is named after what it provides. Tests import it as ``from support import faults``.
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository."""
