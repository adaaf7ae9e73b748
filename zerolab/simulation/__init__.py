"""Simulate training steps on clusters that are not there."""

from zerolab.simulation.cluster import Cluster
from zerolab.simulation.play import Simulation, play, record, simulate

__all__ = ["Cluster", "Simulation", "play", "record", "simulate"]
