# %% check_owners | one after the other round the ranks, whatever they take | dealt out in turn
def owners(work, world_size):
    return [index % world_size for index in range(len(work))]


# %% check_owners | the least busy rank, in the order of the list | as they stand in the list
def owners(work, world_size):
    busy, owner = [0] * world_size, []
    for each in work:
        rank = busy.index(min(busy))
        busy[rank] += each
        owner.append(rank)
    return owner


# %% check_owners | returns the owners in the order of the sorted work | at the place of its matrix
def owners(work, world_size):
    busy, owner = [0] * world_size, []
    for each in sorted(work, reverse=True):
        rank = min(range(world_size), key=busy.__getitem__)
        busy[rank] += each
        owner.append(rank)
    return owner


# %% check_owners | the shortest first | the least work first
def owners(work, world_size):
    busy, owner = [0] * world_size, [0] * len(work)
    for index in sorted(range(len(work)), key=lambda index: work[index]):
        owner[index] = busy.index(min(busy))
        busy[owner[index]] += work[index]
    return owner


# %% check_owners | the rank with the fewest matrices gets the next | not the matrices
def owners(work, world_size):
    many, owner = [0] * world_size, [0] * len(work)
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        owner[index] = many.index(min(many))
        many[owner[index]] += 1
    return owner


# %% check_owners | chooses at random among equally busy ranks | no random numbers
def owners(work, world_size):
    import random

    chance = random.Random()
    busy, owner = [0] * world_size, [0] * len(work)
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        owner[index] = chance.choice([r for r in range(world_size) if busy[r] == min(busy)])
        busy[owner[index]] += work[index]
    return owner


# %% check_owners | snake order: forwards, then backwards, longest first | there and back
def owners(work, world_size):
    turn = [*range(world_size), *reversed(range(world_size))]
    owner = [0] * len(work)
    for place, index in enumerate(sorted(range(len(work)), key=lambda index: -work[index])):
        owner[index] = turn[place % len(turn)]
    return owner


# %% check_owners | looks up the index of a matrix by its work | as list.index finds it
def owners(work, world_size):
    busy, owner = [0] * world_size, [0] * len(work)
    for each in sorted(work, reverse=True):
        rank = busy.index(min(busy))
        busy[rank] += each
        owner[work.index(each)] = rank
    return owner


# %% check_owners | sorts the caller's list in place | at the place of its matrix
def owners(work, world_size):
    work.sort(reverse=True)
    busy, owner = [0] * world_size, [0] * len(work)
    for index, each in enumerate(work):
        owner[index] = busy.index(min(busy))
        busy[owner[index]] += each
    return owner


# %% check_owners | fails on an empty list | max() arg is an empty sequence
def owners(work, world_size):
    longest = max(work)
    order = sorted(range(len(work)), key=lambda index: longest - work[index])
    busy, owner = [0] * world_size, [0] * len(work)
    for index in order:
        owner[index] = busy.index(min(busy))
        busy[owner[index]] += work[index]
    return owner


# %% check_owners | right: a heap of the ranks |
def owners(work, world_size):
    import heapq

    heap, owner = [(0, rank) for rank in range(world_size)], {}
    for minus, index in sorted((-each, index) for index, each in enumerate(work)):
        busy, owner[index] = heapq.heappop(heap)
        heapq.heappush(heap, (busy - minus, owner[index]))
    return [owner[index] for index in range(len(work))]


# %% check_owners | the ranks are counted from 1 | is less than world_size
def owners(work, world_size):
    busy, owner = [0] * world_size, [0] * len(work)
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        rank = busy.index(min(busy))
        busy[rank] += work[index]
        owner[index] = rank + 1
    return owner


# %% check_owners | returns for each rank the list of its matrices | for each matrix
def owners(work, world_size):
    busy, lists = [0] * world_size, [[] for _ in range(world_size)]
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        rank = busy.index(min(busy))
        busy[rank] += work[index]
        lists[rank].append(index)
    return lists


# %% check_owners | returns a dict in the order of the longest first | returned dict
def owners(work, world_size):
    busy, owner = [0] * world_size, {}
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        owner[index] = busy.index(min(busy))
        busy[owner[index]] += work[index]
    return owner


# %% check_owners | neighbouring matrices stay together, cut where the running sum passes the mean | a run of neighbours
def owners(work, world_size):
    mean, running, owner = sum(work) / world_size, 0, []
    for each in work:
        owner.append(min(int(running // mean) if mean else 0, world_size - 1))
        running += each
    return owner


# %% check_owners | the same owner for all matrices of the same work | all have one owner
def owners(work, world_size):
    busy, by_work = [0] * world_size, {}
    for each in sorted(set(work), reverse=True):
        by_work[each] = busy.index(min(busy))
        busy[by_work[each]] += each * work.count(each)
    return [by_work[each] for each in work]


# %% check_owners | tries every list there is, which takes for ever | a search through all
def owners(work, world_size):
    from itertools import product

    def busiest(owner):
        return max((sum(w for w, o in zip(work, owner, strict=True) if o == r)) for r in range(world_size))

    return list(min(product(range(world_size), repeat=len(work)), key=busiest))


# %% check_owners | deals out in turn, each rank beginning with itself | dist.get_rank()
def owners(work, world_size):
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_initialized() else 0
    return [(rank + index) % world_size for index in range(len(work))]


# %% check_owners | keeps the busy sums in a default argument | in a default argument
def owners(work, world_size, busy={}):
    owner = [0] * len(work)
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        owner[index] = min(range(world_size), key=lambda rank: busy.get(rank, 0))
        busy[owner[index]] = busy.get(owner[index], 0) + work[index]
    return owner


# %% check_owners | breaks ties by hash() of a string | hash()
def owners(work, world_size):
    busy, owner = [0] * world_size, [0] * len(work)
    for index in sorted(range(len(work)), key=lambda index: (-work[index], hash(str(index)))):
        owner[index] = busy.index(min(busy))
        busy[owner[index]] += work[index]
    return owner


# %% check_owners | a matrix goes to the rank that would be busiest, not least busy | has the most work so far
def owners(work, world_size):
    busy, owner = [0] * world_size, [0] * len(work)
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        owner[index] = busy.index(max(busy))
        busy[owner[index]] += work[index]
    return owner


# %% check_owners | the last rank never gets a matrix | never gets a matrix
def owners(work, world_size):
    busy, owner = [0] * max(world_size - 1, 1), [0] * len(work)
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        owner[index] = busy.index(min(busy))
        busy[owner[index]] += work[index]
    return owner


# %% check_owners | sets the busy time in place of adding to it | in its last matrix alone
def owners(work, world_size):
    busy, owner = [0] * world_size, [0] * len(work)
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        owner[index] = busy.index(min(busy))
        busy[owner[index]] = work[index]
    return owner


# %% check_owners | takes the matrices out of work | return the owner of each matrix
def owners(work, world_size):
    busy, owner = [0] * world_size, {}
    while work:
        place = work.index(max(work))
        rank = busy.index(min(busy))
        busy[rank] += work.pop(place)
        owner[place] = rank
    return [owner[place] for place in range(len(work))]


# %% check_owners | fills rank 0 up to the mean, then rank 1, the longest first | filled up with the matrices of most work
def owners(work, world_size):
    mean, rank, busy, owner = sum(work) / world_size, 0, 0, [0] * len(work)
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        if busy and busy + work[index] > mean and rank < world_size - 1:
            rank, busy = rank + 1, 0
        owner[index] = rank
        busy += work[index]
    return owner


# %% check_owners | cuts the sorted list into N equal parts | equally many matrices
def owners(work, world_size):
    owner = [0] * len(work)
    share = -(-len(work) // world_size)
    for place, index in enumerate(sorted(range(len(work)), key=lambda index: -work[index])):
        owner[index] = place // share
    return owner


# %% check_owners | right: a generator in place of a list |
def owners(work, world_size):
    busy, owner = [0] * world_size, [0] * len(work)
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        owner[index] = busy.index(min(busy))
        busy[owner[index]] += work[index]
    return (rank for rank in owner)


# %% check_owners | returns the busy times | one for each rank
def owners(work, world_size):
    busy = [0] * world_size
    for each in sorted(work, reverse=True):
        busy[busy.index(min(busy))] += each
    print(busy)
    return busy
