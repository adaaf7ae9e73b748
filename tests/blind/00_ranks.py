# %% check_average | returns the sum, not the mean | That is the sum
def average(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.send(own, dst=0)
        total = torch.empty_like(own)
        dist.recv(total, src=0)
        return total
    total, theirs = own.clone(), torch.empty_like(own)
    for other in range(1, world_size):
        dist.recv(theirs, src=other)
        total += theirs
    for other in range(1, world_size):
        dist.send(total, dst=other)
    return total


# %% check_average | divides by 2 for any number of ranks | The sum was divided by
def average(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.send(own, dst=0)
        mean = torch.empty_like(own)
        dist.recv(mean, src=0)
        return mean
    total, theirs = own.clone(), torch.empty_like(own)
    for other in range(1, world_size):
        dist.recv(theirs, src=other)
        total += theirs
    mean = total / 2
    for other in range(1, world_size):
        dist.send(mean, dst=other)
    return mean


# %% check_average | rank 0 divides, but sends the sum to the others | is not: that is the sum
def average(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.send(own, dst=0)
        result = torch.empty_like(own)
        dist.recv(result, src=0)
        return result
    total, theirs = own.clone(), torch.empty_like(own)
    for other in range(1, world_size):
        dist.recv(theirs, src=other)
        total += theirs
    for other in range(1, world_size):
        dist.send(total, dst=other)
    return total / world_size


# %% check_average | rank 0 forgets its own gradient | gradient is missing
def average(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    buffer = torch.zeros_like(own)
    if rank == 0:
        total = torch.zeros_like(own)
        for other in range(1, world_size):
            dist.recv(buffer, src=other)
            total += buffer
        total /= world_size
        for other in range(1, world_size):
            dist.send(total, dst=other)
        return total
    dist.send(own, dst=0)
    dist.recv(buffer, src=0)
    return buffer


# %% check_average | the ranks beside 0 return own, not the buffer | it returned its own gradient
def average(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    buffer = torch.zeros_like(own)
    if rank == 0:
        for other in range(1, world_size):
            dist.recv(buffer, src=other)
            own = own + buffer
        own = own / world_size
        for other in range(1, world_size):
            dist.send(own, dst=other)
    else:
        dist.send(own, dst=0)
        dist.recv(buffer, src=0)
    return own


# %% check_average | mean of pairs along a chain, so early ranks weigh less | That is a mean of means
def average(own):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    mean, theirs = own, torch.empty_like(own)
    if rank > 0:
        dist.recv(theirs, src=rank - 1)
        mean = (own + theirs) / 2
    if rank < last:
        dist.send(mean, dst=rank + 1)
        mean = torch.empty_like(own)
        dist.recv(mean, src=rank + 1)
    if rank > 0:
        dist.send(mean, dst=rank - 1)
    return mean


# %% check_average | rank 0 sends the mean to all but the last rank | that was never sent
def average(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty_like(own)
    if rank > 0:
        dist.send(own, dst=0)
        dist.recv(theirs, src=0)
        return theirs
    total = own.clone()
    for other in range(1, world_size):
        dist.recv(theirs, src=other)
        total += theirs
    mean = total / world_size
    for other in range(1, world_size - 1):
        dist.send(mean, dst=other)
    return mean


# %% check_average | right: every rank exchanges with every other, with isend and irecv |
def average(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    buffers = {peer: torch.empty_like(own) for peer in range(world_size) if peer != rank}
    handles = [dist.irecv(buffer, src=peer) for peer, buffer in buffers.items()]
    handles += [dist.isend(own, dst=peer) for peer in buffers]
    for handle in handles:
        handle.wait()
    return torch.stack([own, *buffers.values()]).mean(0)


# %% check_average | right: the sum goes along a chain and the mean comes back |
def average(own):
    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.zeros_like(own)
    if rank:
        dist.recv(total, src=rank - 1)
    total.add_(own)
    if rank + 1 < size:
        dist.send(total, dst=rank + 1)
        dist.recv(total, src=rank + 1)
    else:
        total.div_(size)
    if rank:
        dist.send(total, dst=rank - 1)
    return total


# %% check_shift | every rank receives first, so all of them wait | all of them receive first
def shift(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty_like(own)
    if rank == 0:
        dist.recv(theirs, src=world_size - 1)
        dist.send(own, dst=1)
    else:
        dist.recv(theirs, src=rank - 1)
        dist.send(own, dst=(rank + 1) % world_size)
    return theirs


# %% check_shift | sends to the rank before and returns the tensor of the next | right neighbour's tensor
def shift(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty_like(own)
    if rank == 0:
        dist.send(own, dst=world_size - 1)
        dist.recv(theirs, src=1)
    else:
        dist.recv(theirs, src=(rank + 1) % world_size)
        dist.send(own, dst=rank - 1)
    return theirs


# %% check_shift | receives into own before own is sent | not the one that has just arrived
def shift(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        dist.send(own, dst=1)
        dist.recv(own, src=world_size - 1)
    else:
        dist.recv(own, src=rank - 1)
        dist.send(own, dst=(rank + 1) % world_size)
    return own


# %% check_shift | does not wait for the handles of isend and irecv | waited for none of them
def shift(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    theirs = torch.zeros_like(own)
    dist.isend(own, dst=(rank + 1) % world_size)
    dist.irecv(theirs, src=(rank - 1) % world_size)
    return theirs


# %% check_shift | swaps by pairs, with rank ^ 1 | exchange messages as a pair
def shift(own):
    rank = dist.get_rank()
    peer, theirs = rank ^ 1, torch.empty_like(own)
    if rank % 2 == 0:
        dist.send(own, dst=peer)
        dist.recv(theirs, src=peer)
    else:
        dist.recv(theirs, src=peer)
        dist.send(own, dst=peer)
    return theirs


# %% check_shift | the last rank does not send to rank 0, which keeps its own tensor | rank 0 gets none
def shift(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    theirs = own.clone()
    handle = dist.isend(own, dst=rank + 1) if rank < world_size - 1 else None
    if rank > 0:
        dist.recv(theirs, src=rank - 1)
    if handle:
        handle.wait()
    return theirs


# %% check_shift | the values are right, but all tensors go through rank 0 (bronze only) | and one is enough
def shift(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.send(own, dst=0)
        theirs = torch.empty_like(own)
        dist.recv(theirs, src=0)
        return theirs
    everything = [own.clone()]
    for other in range(1, world_size):
        everything.append(torch.empty_like(own))
        dist.recv(everything[-1], src=other)
    for other in range(1, world_size):
        dist.send(everything[other - 1], dst=other)
    return everything[-1]


# %% check_shift | right: the receive is started first, the blocking send comes after it |
def shift(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    arriving = torch.zeros_like(own)
    handle = dist.irecv(arriving, src=rank - 1 if rank else world_size - 1)
    dist.send(own, (rank + 1) % world_size)
    handle.wait()
    return arriving


# %% check_shift | waits within any(), which stops at the first True | messages and waited for
def shift(own):
    rank, size = dist.get_rank(), dist.get_world_size()
    arriving = own.new_empty(own.shape)
    operations = [
        dist.P2POp(dist.irecv, arriving, (rank + size - 1) % size),
        dist.P2POp(dist.isend, own.contiguous(), (rank + 1) % size),
    ]
    any(handle.wait() for handle in dist.batch_isend_irecv(operations))
    return arriving


# %% check_average | also averages over the elements of the gradient | in all elements
def average(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty_like(own)
    if rank > 0:
        dist.send(own, dst=0)
        dist.recv(theirs, src=0)
        return theirs
    everything = [own]
    for other in range(1, world_size):
        dist.recv(theirs, src=other)
        everything.append(theirs.clone())
    mean = torch.full_like(own, torch.stack(everything).mean().item())
    for other in range(1, world_size):
        dist.send(mean, dst=other)
    return mean


# %% check_average | keeps one buffer N-1 times in a list | have arrived in one tensor
def average(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty_like(own)
    if rank > 0:
        dist.send(own, dst=0)
        dist.recv(theirs, src=0)
        return theirs
    everything = [own]
    for other in range(1, world_size):
        dist.recv(theirs, src=other)
        everything.append(theirs)
    mean = torch.stack(everything).mean(0)
    for other in range(1, world_size):
        dist.send(mean, dst=other)
    return mean


# %% check_average | butterfly with rank ^ distance, for powers of two only | exchange messages as a pair
def average(own):
    rank, world_size, total = dist.get_rank(), dist.get_world_size(), own.clone()
    distance = 1
    while distance < world_size:
        peer, theirs = rank ^ distance, torch.empty_like(own)
        if rank < peer:
            dist.send(total, dst=peer)
            dist.recv(theirs, src=peer)
        else:
            dist.recv(theirs, src=peer)
            dist.send(total, dst=peer)
        total += theirs
        distance *= 2
    return total / world_size


# %% check_average | receives into a buffer of fp64, where fp32 arrives | elements of float64
def average(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    buffer = torch.zeros(own.shape, dtype=torch.float64)
    if rank > 0:
        dist.send(own, dst=0)
        dist.recv(buffer, src=0)
        return buffer
    total = own.double()
    for other in range(1, world_size):
        dist.recv(buffer, src=other)
        total += buffer
    total /= world_size
    for other in range(1, world_size):
        dist.send(total, dst=other)
    return total


# %% check_average | the loop over the others starts at 0, so rank 0 waits for itself | a message with itself
def average(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty_like(own)
    if rank > 0:
        dist.send(own, dst=0)
        dist.recv(theirs, src=0)
        return theirs
    total = own.clone()
    for other in range(world_size):
        dist.recv(theirs, src=other)
        total += theirs
    for other in range(1, world_size):
        dist.send(total / world_size, dst=other)
    return total / world_size


# %% check_average | divides by the number of the others, world_size - 1 | number of the other ranks
def average(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty_like(own)
    if rank > 0:
        dist.send(own, dst=0)
        dist.recv(theirs, src=0)
        return theirs
    total = own.clone()
    for other in range(1, world_size):
        dist.recv(theirs, src=other)
        total += theirs
    total /= world_size - 1
    for other in range(1, world_size):
        dist.send(total, dst=other)
    return total


# %% check_average | rank 0 sends each rank its running sum | has the sum up to itself
def average(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty_like(own)
    if rank > 0:
        dist.send(own, dst=0)
        dist.recv(theirs, src=0)
        return theirs
    total = own.clone()
    for other in range(1, world_size):
        dist.recv(theirs, src=other)
        total += theirs
        dist.send(total / world_size, dst=other)
    return total / world_size


# %% check_shift | the peer is 1 - rank, for two ranks only | exchange messages as a pair
def shift(own):
    rank = dist.get_rank()
    theirs = torch.empty_like(own)
    if rank == 0:
        dist.send(own, dst=1 - rank)
        dist.recv(theirs, src=1 - rank)
    else:
        dist.recv(theirs, src=1 - rank)
        dist.send(own, dst=1 - rank)
    return theirs


# %% check_shift | send and receive have different tags, so no message ever matches | which sent with tag
def shift(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty_like(own)
    handle = dist.isend(own, dst=(rank + 1) % world_size, tag=rank)
    dist.recv(theirs, src=(rank - 1) % world_size, tag=rank)
    handle.wait()
    return theirs


# %% check_shift | returns a list with the tensor in it | it returned list
def shift(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    arriving = [torch.empty_like(own)]
    handle = dist.isend(own, dst=(rank + 1) % world_size)
    dist.recv(arriving[0], src=(rank - 1) % world_size)
    handle.wait()
    return arriving


# %% check_shift | returns its own tensor, what arrives is thrown away | It returned its own tensor
def shift(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty_like(own)
    handle = dist.isend(own, dst=(rank + 1) % world_size)
    dist.recv(theirs, src=(rank - 1) % world_size)
    handle.wait()
    return own


# %% check_shift | sends from own while the arriving tensor is received into own | into the tensor that it is sending
def shift(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    messages = [dist.P2POp(dist.irecv, own, (rank - 1) % world_size)]
    messages.append(dist.P2POp(dist.isend, own, (rank + 1) % world_size))
    for handle in dist.batch_isend_irecv(messages):
        handle.wait()
    return own


# %% check_shift | gathers all tensors with a collective and takes one | dist.all_gather
def shift(own):
    everything = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everything, own)
    return everything[dist.get_rank() - 1]


# %% check_shift | goes round the ring one step too many | one round is enough
def shift(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for _ in range(2):
        theirs = torch.empty_like(own)
        handle = dist.isend(own, dst=(rank + 1) % world_size)
        dist.recv(theirs, src=(rank - 1) % world_size)
        handle.wait()
        own = theirs
    return own


# %% check_shift | odd ranks send to the wrong side | waits, too, and it sent a message to
def shift(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty_like(own)
    to = (rank + 1) % world_size if rank % 2 == 0 else (rank - 1) % world_size
    handle = dist.isend(own, dst=to)
    dist.recv(theirs, src=(rank - 1) % world_size)
    handle.wait()
    return theirs


# %% check_average | receives into own while own is being sent | changes a tensor while it is being sent
def average(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        handle = dist.isend(own, dst=0)
        dist.recv(own, src=0)
        handle.wait()
        return own
    total, theirs = own.clone(), torch.empty_like(own)
    for other in range(1, world_size):
        dist.recv(theirs, src=other)
        total += theirs
    total /= world_size
    for other in range(1, world_size):
        dist.send(total, dst=other)
    return total


# %% check_average | right: a barrier between the two parts, which moves no tensor |
def average(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty_like(own)
    total = own.clone()
    if rank > 0:
        dist.send(own, dst=0)
    else:
        for other in range(1, world_size):
            dist.recv(theirs, src=other)
            total += theirs
    dist.barrier()
    if rank > 0:
        dist.recv(total, src=0)
        return total
    for other in range(1, world_size):
        dist.send(total / world_size, dst=other)
    return total / world_size


# %% check_average | an assert that there are two ranks | two ranks only
def average(own):
    rank = dist.get_rank()
    assert dist.get_world_size() == 2, "two ranks only"
    theirs = torch.empty_like(own)
    if rank == 0:
        dist.send(own, dst=1)
        dist.recv(theirs, src=1)
    else:
        dist.recv(theirs, src=0)
        dist.send(own, dst=0)
    return (own + theirs) / 2


# %% check_average | returns a list of numbers, not a tensor | it returned list
def average(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty_like(own)
    if rank > 0:
        dist.send(own, dst=0)
        dist.recv(theirs, src=0)
        return theirs.tolist()
    total = own.clone()
    for other in range(1, world_size):
        dist.recv(theirs, src=other)
        total += theirs
    total /= world_size
    for other in range(1, world_size):
        dist.send(total, dst=other)
    return total.tolist()


# %% check_average | the others receive from the rank before | for a message from rank 1 that was not sent
def average(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty_like(own)
    if rank > 0:
        dist.send(own, dst=0)
        dist.recv(theirs, src=rank - 1)
        return theirs
    total = own.clone()
    for other in range(1, world_size):
        dist.recv(theirs, src=other)
        total += theirs
    for other in range(1, world_size):
        dist.send(total / world_size, dst=other)
    return total / world_size


# %% check_shift | rank + 1 without the modulus | count modulo the number of ranks
def shift(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty_like(own)
    handle = dist.isend(own, dst=rank + 1)
    dist.recv(theirs, src=(rank - 1) % world_size)
    handle.wait()
    return theirs


# %% check_shift | each element is a message of its own (bronze) | and one is enough
def shift(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty_like(own)
    for place in range(own.numel()):
        handle = dist.isend(own.view(-1)[place : place + 1], dst=(rank + 1) % world_size)
        dist.recv(theirs.view(-1)[place : place + 1], src=(rank - 1) % world_size)
        handle.wait()
    return theirs


# %% check_shift | waits for the isend before it receives | all of them send first
def shift(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty_like(own)
    dist.isend(own, dst=(rank + 1) % world_size).wait()
    dist.recv(theirs, src=(rank - 1) % world_size)
    return theirs


# %% check_shift | the buffer is torch.empty(2) | receives them into a tensor of
def shift(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty(2, dtype=own.dtype)
    handle = dist.isend(own, dst=(rank + 1) % world_size)
    dist.recv(theirs, src=(rank - 1) % world_size)
    handle.wait()
    return theirs
