"""Simulate training steps on clusters that are not there."""

from zerolab.simulation.cluster import Cluster
from zerolab.simulation.play import Alone, Simulation, play, play_turn, record, simulate

__all__ = ["Alone", "Cluster", "Simulation", "play", "play_turn", "record", "simulate"]
