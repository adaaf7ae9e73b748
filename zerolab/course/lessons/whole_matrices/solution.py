"""Solution of lesson 10's exercise."""


def owners(work, world_size):
    loads, found = [0] * world_size, [0] * len(work)
    longest_first = sorted(range(len(work)), key=lambda place: work[place], reverse=True)
    for place in longest_first:
        found[place] = loads.index(min(loads))
        loads[found[place]] += work[place]
    return found
