"""Lesson 09, the incident room: twelve engines with one fault each, a test of your own, and four stages."""

from zerolab.course.lessons.incident_room.engine import MOMENTUM, Engine
from zerolab.course.lessons.incident_room.from_empty import check_stages, show_trillion
from zerolab.course.lessons.incident_room.own_tests import check_test
from zerolab.course.lessons.incident_room.tickets.ticket_01 import Engine1, check_1
from zerolab.course.lessons.incident_room.tickets.ticket_02 import Engine2, check_2
from zerolab.course.lessons.incident_room.tickets.ticket_03 import Engine3, check_3
from zerolab.course.lessons.incident_room.tickets.ticket_04 import Engine4, check_4
from zerolab.course.lessons.incident_room.tickets.ticket_05 import Engine5, check_5
from zerolab.course.lessons.incident_room.tickets.ticket_06 import Engine6, check_6
from zerolab.course.lessons.incident_room.tickets.ticket_07 import Engine7, check_7
from zerolab.course.lessons.incident_room.tickets.ticket_08 import UNITS, Engine8, check_8
from zerolab.course.lessons.incident_room.tickets.ticket_09 import Engine9, check_9
from zerolab.course.lessons.incident_room.tickets.ticket_10 import Engine10, check_10
from zerolab.course.lessons.incident_room.tickets.ticket_11 import Engine11, check_11
from zerolab.course.lessons.incident_room.tickets.ticket_12 import Engine12, check_12

__all__ = [
    "MOMENTUM",
    "UNITS",
    "Engine",
    "Engine1",
    "Engine2",
    "Engine3",
    "Engine4",
    "Engine5",
    "Engine6",
    "Engine7",
    "Engine8",
    "Engine9",
    "Engine10",
    "Engine11",
    "Engine12",
    "check_1",
    "check_2",
    "check_3",
    "check_4",
    "check_5",
    "check_6",
    "check_7",
    "check_8",
    "check_9",
    "check_10",
    "check_11",
    "check_12",
    "check_stages",
    "check_test",
    "show_trillion",
]
