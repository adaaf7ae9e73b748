# %% check_reduce_scatter | one round too few, so the last contribution is missing | A rank made 1 round
def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    buffer = torch.empty(pieces[0].stop, dtype=tensor.dtype)
    for step in range(world_size - 2):
        outgoing = tensor[pieces[(rank - step - 1) % world_size]]
        home = tensor[pieces[(rank - step - 2) % world_size]]
        landing = buffer[: home.numel()]
        messages = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)]
        messages.append(dist.P2POp(dist.irecv, landing, (rank - 1) % world_size))
        for handle in dist.batch_isend_irecv(messages):
            handle.wait()
        home += landing
    return tensor[pieces[rank]]


# %% check_reduce_scatter | starts with its own chunk | ended with the next rank's chunk
def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    for step in range(world_size - 1):
        outgoing = tensor[pieces[(rank - step) % world_size]]
        home = tensor[pieces[(rank - step - 1) % world_size]]
        landing = torch.empty_like(home)
        messages = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)]
        messages.append(dist.P2POp(dist.irecv, landing, (rank - 1) % world_size))
        for handle in dist.batch_isend_irecv(messages):
            handle.wait()
        home += landing
    return tensor[pieces[(rank + 1) % world_size]]


# %% check_reduce_scatter | overwrites its own copy with what arrives, and adds nothing | instead of replacing
def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    for step in range(world_size - 1):
        outgoing = tensor[pieces[(rank - step - 1) % world_size]]
        home = tensor[pieces[(rank - step - 2) % world_size]]
        messages = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)]
        messages.append(dist.P2POp(dist.irecv, home, (rank - 1) % world_size))
        for handle in dist.batch_isend_irecv(messages):
            handle.wait()
    return tensor[pieces[rank]]


# %% check_reduce_scatter | adds before it has waited for the messages | before its message has arrived
def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    for step in range(world_size - 1):
        outgoing = tensor[pieces[(rank - step - 1) % world_size]]
        home = tensor[pieces[(rank - step - 2) % world_size]]
        landing = torch.zeros_like(home)
        messages = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)]
        messages.append(dist.P2POp(dist.irecv, landing, (rank - 1) % world_size))
        handles = dist.batch_isend_irecv(messages)
        home += landing
        for handle in handles:
            handle.wait()
    return tensor[pieces[rank]]


# %% check_reduce_scatter | sends each chunk straight to its owner | sends to several others
def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    total = tensor[pieces[rank]].clone()
    landing = torch.empty_like(total)
    for distance in range(1, world_size):
        to, source = (rank + distance) % world_size, (rank - distance) % world_size
        messages = [dist.P2POp(dist.isend, tensor[pieces[to]], to)]
        messages.append(dist.P2POp(dist.irecv, landing, source))
        for handle in dist.batch_isend_irecv(messages):
            handle.wait()
        total += landing
    return total


# %% check_reduce_scatter | passes whole tensors round the ring | sends the whole tensor each round
def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total, outgoing = tensor.clone(), tensor.clone()
    for _ in range(world_size - 1):
        arriving = torch.empty_like(tensor)
        messages = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)]
        messages.append(dist.P2POp(dist.irecv, arriving, (rank - 1) % world_size))
        for handle in dist.batch_isend_irecv(messages):
            handle.wait()
        total += arriving
        outgoing = arriving
    return total[ring.chunks(tensor.numel(), world_size)[rank]]


# %% check_reduce_scatter | the buffer has always the size of its own chunk | receives them into a tensor of
def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    landing = torch.empty_like(tensor[pieces[rank]])
    for step in range(world_size - 1):
        outgoing = tensor[pieces[(rank - step - 1) % world_size]]
        messages = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)]
        messages.append(dist.P2POp(dist.irecv, landing, (rank - 1) % world_size))
        for handle in dist.batch_isend_irecv(messages):
            handle.wait()
        tensor[pieces[(rank - step - 2) % world_size]] += landing
    return tensor[pieces[rank]]


# %% check_reduce_scatter | returns the whole tensor, with its chunk complete | returned the whole tensor
def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    for step in range(world_size - 1):
        outgoing = tensor[pieces[(rank - step - 1) % world_size]]
        home = tensor[pieces[(rank - step - 2) % world_size]]
        landing = torch.empty_like(home)
        messages = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)]
        messages.append(dist.P2POp(dist.irecv, landing, (rank - 1) % world_size))
        for handle in dist.batch_isend_irecv(messages):
            handle.wait()
        home += landing
    return tensor


# %% check_reduce_scatter | divides by the number of ranks, as for a mean | That is the mean
def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    for step in range(world_size - 1):
        outgoing = tensor[pieces[(rank - step - 1) % world_size]]
        home = tensor[pieces[(rank - step - 2) % world_size]]
        landing = torch.empty_like(home)
        messages = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)]
        messages.append(dist.P2POp(dist.irecv, landing, (rank - 1) % world_size))
        for handle in dist.batch_isend_irecv(messages):
            handle.wait()
        home += landing
    return tensor[pieces[rank]] / world_size


# %% check_reduce_scatter | right: the ring runs the other way, with a running sum in place of the tensor |
def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    before, after = (rank - 1) % world_size, (rank + 1) % world_size
    partial_sum = tensor[pieces[after]].clone() if world_size > 1 else tensor[pieces[0]]
    for step in range(1, world_size):
        mine = tensor[pieces[(rank + step + 1) % world_size]]
        arriving = torch.empty_like(mine)
        handle = dist.irecv(arriving, src=after)
        dist.send(partial_sum, dst=before)
        handle.wait()
        partial_sum = arriving.add_(mine)
    return partial_sum


# %% check_all_reduce | forgets the second half | the second half is missing
def exchange(outgoing, arriving):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    messages = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)]
    messages.append(dist.P2POp(dist.irecv, arriving, (rank - 1) % world_size))
    for handle in dist.batch_isend_irecv(messages):
        handle.wait()


def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    for step in range(world_size - 1):
        home = tensor[pieces[(rank - step - 2) % world_size]]
        arriving = torch.empty_like(home)
        exchange(tensor[pieces[(rank - step - 1) % world_size]], arriving)
        home += arriving
    return tensor[pieces[rank]]


def my_all_reduce(tensor):
    my_reduce_scatter(tensor)
    return tensor


# %% check_all_reduce | gathers with the first half's indices | begins with a chunk that is not complete
def exchange(outgoing, arriving):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    messages = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)]
    messages.append(dist.P2POp(dist.irecv, arriving, (rank - 1) % world_size))
    for handle in dist.batch_isend_irecv(messages):
        handle.wait()


def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    for step in range(world_size - 1):
        home = tensor[pieces[(rank - step - 2) % world_size]]
        arriving = torch.empty_like(home)
        exchange(tensor[pieces[(rank - step - 1) % world_size]], arriving)
        home += arriving
    return tensor[pieces[rank]]


def my_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    my_reduce_scatter(tensor)
    for step in range(world_size - 1):
        outgoing = tensor[pieces[(rank - step - 1) % world_size]]
        home = tensor[pieces[(rank - step - 2) % world_size]]
        messages = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)]
        messages.append(dist.P2POp(dist.irecv, home, (rank - 1) % world_size))
        for handle in dist.batch_isend_irecv(messages):
            handle.wait()
    return tensor


# %% check_all_reduce | adds in the second half, too | The second half adds what arrives
def exchange(outgoing, arriving):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    messages = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)]
    messages.append(dist.P2POp(dist.irecv, arriving, (rank - 1) % world_size))
    for handle in dist.batch_isend_irecv(messages):
        handle.wait()


def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    for step in range(world_size - 1):
        home = tensor[pieces[(rank - step - 2) % world_size]]
        arriving = torch.empty_like(home)
        exchange(tensor[pieces[(rank - step - 1) % world_size]], arriving)
        home += arriving
    return tensor[pieces[rank]]


def my_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    my_reduce_scatter(tensor)
    for step in range(world_size - 1):
        outgoing = tensor[pieces[(rank - step) % world_size]]
        home = tensor[pieces[(rank - step - 1) % world_size]]
        landing = torch.empty_like(home)
        messages = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)]
        messages.append(dist.P2POp(dist.irecv, landing, (rank - 1) % world_size))
        for handle in dist.batch_isend_irecv(messages):
            handle.wait()
        home += landing
    return tensor


# %% check_all_reduce | sums in a clone that is never copied back | A clone, or
def exchange(outgoing, arriving):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    messages = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)]
    messages.append(dist.P2POp(dist.irecv, arriving, (rank - 1) % world_size))
    for handle in dist.batch_isend_irecv(messages):
        handle.wait()


def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    for step in range(world_size - 1):
        home = tensor[pieces[(rank - step - 2) % world_size]]
        arriving = torch.empty_like(home)
        exchange(tensor[pieces[(rank - step - 1) % world_size]], arriving)
        home += arriving
    return tensor[pieces[rank]]


def my_all_gather(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    for step in range(world_size - 1):
        exchange(tensor[pieces[(rank - step) % world_size]], tensor[pieces[(rank - step - 1) % world_size]])


def my_all_reduce(tensor):
    work = tensor.clone()
    my_reduce_scatter(work)
    my_all_gather(work)


# %% check_all_reduce | cuts with numel // N | loses the remainder
def exchange(outgoing, arriving):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    messages = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)]
    messages.append(dist.P2POp(dist.irecv, arriving, (rank - 1) % world_size))
    for handle in dist.batch_isend_irecv(messages):
        handle.wait()


def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    for step in range(world_size - 1):
        home = tensor[pieces[(rank - step - 2) % world_size]]
        arriving = torch.empty_like(home)
        exchange(tensor[pieces[(rank - step - 1) % world_size]], arriving)
        home += arriving
    return tensor[pieces[rank]]


def my_all_gather(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    for step in range(world_size - 1):
        exchange(tensor[pieces[(rank - step) % world_size]], tensor[pieces[(rank - step - 1) % world_size]])


def my_all_reduce(tensor):
    world_size = dist.get_world_size()
    share = tensor.numel() // world_size
    head = tensor[: share * world_size].clone()
    my_reduce_scatter(head)
    my_all_gather(head)
    tensor[: share * world_size] = head
    return tensor


# %% check_all_reduce | uses a collective of torch | dist.all_reduce
def my_all_reduce(tensor):
    dist.all_reduce(tensor)
    return tensor


# %% check_all_reduce | gathers a list of the chunks (silver, no gold) | a second one of full size
def exchange(outgoing, arriving):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    messages = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)]
    messages.append(dist.P2POp(dist.irecv, arriving, (rank - 1) % world_size))
    for handle in dist.batch_isend_irecv(messages):
        handle.wait()


def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    for step in range(world_size - 1):
        home = tensor[pieces[(rank - step - 2) % world_size]]
        arriving = torch.empty_like(home)
        exchange(tensor[pieces[(rank - step - 1) % world_size]], arriving)
        home += arriving
    return tensor[pieces[rank]]


def my_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    done = {rank: my_reduce_scatter(tensor).clone()}
    for step in range(world_size - 1):
        outgoing = done[(rank - step) % world_size]
        source = (rank - step - 1) % world_size
        done[source] = torch.empty_like(tensor[pieces[source]])
        messages = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)]
        messages.append(dist.P2POp(dist.irecv, done[source], (rank - 1) % world_size))
        for handle in dist.batch_isend_irecv(messages):
            handle.wait()
    return torch.cat([done[place] for place in range(world_size)])


# %% check_all_reduce | rank 0 adds up and sends to all (bronze, no silver) | messages are the whole tensor
def my_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.send(tensor, dst=0)
        dist.recv(tensor, src=0)
        return tensor
    arriving = torch.empty_like(tensor)
    for other in range(1, world_size):
        dist.recv(arriving, src=other)
        tensor += arriving
    for other in range(1, world_size):
        dist.send(tensor, dst=other)
    return tensor


# %% check_all_reduce | right: both halves in one loop of 2(N-1) rounds |
def my_all_reduce(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), n)
    for turn in range(2 * (n - 1)):
        out, into = tensor[pieces[(rank - turn - 1) % n]], tensor[pieces[(rank - turn - 2) % n]]
        arriving = torch.empty_like(into)
        handle = dist.irecv(arriving, src=(rank - 1) % n)
        dist.send(out, dst=(rank + 1) % n)
        handle.wait()
        into.copy_(into + arriving if turn < n - 1 else arriving)


# %% check_reduce_scatter | cuts with tensor.chunk, which cuts in another way | torch.chunk's cut
def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = tensor.chunk(world_size)
    for step in range(world_size - 1):
        outgoing = pieces[(rank - step - 1) % world_size]
        home = pieces[(rank - step - 2) % world_size]
        landing = torch.empty_like(home)
        messages = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)]
        messages.append(dist.P2POp(dist.irecv, landing, (rank - 1) % world_size))
        for handle in dist.batch_isend_irecv(messages):
            handle.wait()
        home += landing
    return pieces[rank]


# %% check_reduce_scatter | sends to the left with the indices of a ring to the right | to the other neighbour
def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    for step in range(world_size - 1):
        outgoing = tensor[pieces[(rank - step - 1) % world_size]]
        home = tensor[pieces[(rank - step - 2) % world_size]]
        landing = torch.zeros_like(home)
        messages = [dist.P2POp(dist.isend, outgoing, (rank - 1) % world_size)]
        messages.append(dist.P2POp(dist.irecv, landing, (rank + 1) % world_size))
        for handle in dist.batch_isend_irecv(messages):
            handle.wait()
        home += landing
    return tensor[pieces[rank]]


# %% check_reduce_scatter | sends the same chunk in every round | is the next one to send
def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    for _ in range(world_size - 1):
        outgoing = tensor[pieces[(rank - 1) % world_size]]
        home = tensor[pieces[(rank - 2) % world_size]]
        landing = torch.empty_like(home)
        messages = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)]
        messages.append(dist.P2POp(dist.irecv, landing, (rank - 1) % world_size))
        for handle in dist.batch_isend_irecv(messages):
            handle.wait()
        home += landing
    return tensor[pieces[rank]]


# %% check_reduce_scatter | all ranks call the blocking send first | all of them send first
def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    for step in range(world_size - 1):
        home = tensor[pieces[(rank - step - 2) % world_size]]
        landing = torch.empty_like(home)
        dist.send(tensor[pieces[(rank - step - 1) % world_size]], (rank + 1) % world_size)
        dist.recv(landing, (rank - 1) % world_size)
        home += landing
    return tensor[pieces[rank]]


# %% check_reduce_scatter | the peers are taken modulo N - 1 | The ranks are counted modulo
def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    for step in range(world_size - 1):
        outgoing = tensor[pieces[(rank - step - 1) % world_size]]
        home = tensor[pieces[(rank - step - 2) % world_size]]
        landing = torch.empty_like(home)
        messages = [dist.P2POp(dist.isend, outgoing, (rank + 1) % (world_size - 1))]
        messages.append(dist.P2POp(dist.irecv, landing, (rank - 1) % (world_size - 1)))
        for handle in dist.batch_isend_irecv(messages):
            handle.wait()
        home += landing
    return tensor[pieces[rank]]


# %% check_reduce_scatter | keeps all arriving buffers (silver, no gold) | receive into one buffer of a chunk
def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    kept = []
    for step in range(world_size - 1):
        outgoing = tensor[pieces[(rank - step - 1) % world_size]]
        home = tensor[pieces[(rank - step - 2) % world_size]]
        kept.append(torch.empty_like(home))
        messages = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)]
        messages.append(dist.P2POp(dist.irecv, kept[-1], (rank - 1) % world_size))
        for handle in dist.batch_isend_irecv(messages):
            handle.wait()
        home += kept[-1]
    return tensor[pieces[rank]]


# %% check_reduce_scatter | N rounds, one too many | stop after N-1 rounds
def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    for step in range(world_size):
        outgoing = tensor[pieces[(rank - step - 1) % world_size]]
        home = tensor[pieces[(rank - step - 2) % world_size]]
        landing = torch.empty_like(home)
        messages = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)]
        messages.append(dist.P2POp(dist.irecv, landing, (rank - 1) % world_size))
        for handle in dist.batch_isend_irecv(messages):
            handle.wait()
        home += landing
    return tensor[pieces[rank]]


# %% check_all_reduce | divides by the number of ranks | That is the mean
def exchange(outgoing, arriving):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    messages = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)]
    messages.append(dist.P2POp(dist.irecv, arriving, (rank - 1) % world_size))
    for handle in dist.batch_isend_irecv(messages):
        handle.wait()


def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    for step in range(world_size - 1):
        home = tensor[pieces[(rank - step - 2) % world_size]]
        arriving = torch.empty_like(home)
        exchange(tensor[pieces[(rank - step - 1) % world_size]], arriving)
        home += arriving
    return tensor[pieces[rank]]


def my_all_gather(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    for step in range(world_size - 1):
        exchange(tensor[pieces[(rank - step) % world_size]], tensor[pieces[(rank - step - 1) % world_size]])


def my_all_reduce(tensor):
    my_reduce_scatter(tensor)
    my_all_gather(tensor)
    tensor /= dist.get_world_size()
    return tensor


# %% check_all_reduce | N rounds in the second half, one too many (bronze, no silver) | A ring of N ranks needs N-1 rounds
def exchange(outgoing, arriving):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    messages = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)]
    messages.append(dist.P2POp(dist.irecv, arriving, (rank - 1) % world_size))
    for handle in dist.batch_isend_irecv(messages):
        handle.wait()


def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    for step in range(world_size - 1):
        home = tensor[pieces[(rank - step - 2) % world_size]]
        arriving = torch.empty_like(home)
        exchange(tensor[pieces[(rank - step - 1) % world_size]], arriving)
        home += arriving
    return tensor[pieces[rank]]


def my_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    my_reduce_scatter(tensor)
    for step in range(world_size):
        outgoing = tensor[pieces[(rank - step) % world_size]].clone()
        home = tensor[pieces[(rank - step - 1) % world_size]]
        messages = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)]
        messages.append(dist.P2POp(dist.irecv, home, (rank - 1) % world_size))
        for handle in dist.batch_isend_irecv(messages):
            handle.wait()
    return tensor


# %% check_all_reduce | the sums go in bf16 to save bytes | sends bfloat16
def my_all_reduce(tensor):
    small = tensor.bfloat16()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total = small.float()
    for _ in range(world_size - 1):
        arriving = torch.empty_like(small)
        messages = [dist.P2POp(dist.isend, small, (rank + 1) % world_size)]
        messages.append(dist.P2POp(dist.irecv, arriving, (rank - 1) % world_size))
        for handle in dist.batch_isend_irecv(messages):
            handle.wait()
        total += arriving.float()
        small = arriving
    return total


# %% check_all_reduce | returns the rank's chunk, the tensor itself is right | It returned its own chunk only
def exchange(outgoing, arriving):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    messages = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)]
    messages.append(dist.P2POp(dist.irecv, arriving, (rank - 1) % world_size))
    for handle in dist.batch_isend_irecv(messages):
        handle.wait()


def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    for step in range(world_size - 1):
        home = tensor[pieces[(rank - step - 2) % world_size]]
        arriving = torch.empty_like(home)
        exchange(tensor[pieces[(rank - step - 1) % world_size]], arriving)
        home += arriving
    return tensor[pieces[rank]]


def my_all_gather(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    for step in range(world_size - 1):
        exchange(tensor[pieces[(rank - step) % world_size]], tensor[pieces[(rank - step - 1) % world_size]])


def my_all_reduce(tensor):
    own = my_reduce_scatter(tensor)
    my_all_gather(tensor)
    return own


# %% check_all_reduce | whole tensors go round the ring (bronze, no silver) | messages are the whole tensor
def my_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    passing, arriving = tensor.clone(), torch.empty_like(tensor)
    for _ in range(world_size - 1):
        messages = [dist.P2POp(dist.isend, passing, (rank + 1) % world_size)]
        messages.append(dist.P2POp(dist.irecv, arriving, (rank - 1) % world_size))
        for handle in dist.batch_isend_irecv(messages):
            handle.wait()
        tensor += arriving
        passing, arriving = arriving, passing


# %% check_all_reduce | adds the neighbours alone, right for three ranks at most | tensor is missing
def my_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total = tensor.clone()
    for peer in {(rank + 1) % world_size, (rank - 1) % world_size} - {rank}:
        arriving = torch.empty_like(tensor)
        messages = [dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.irecv, arriving, peer)]
        for handle in dist.batch_isend_irecv(messages):
            handle.wait()
        total += arriving
    return total


# %% check_all_reduce | calls the package's ring.reduce_scatter and ring.all_gather | calls zerolab's own
def my_all_reduce(tensor):
    ring.reduce_scatter(tensor)
    ring.all_gather(tensor)
    return tensor


# %% check_reduce_scatter | reshapes to N rows | is invalid for input of size
def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = tensor.view(world_size, -1)
    for step in range(world_size - 1):
        arriving = torch.empty_like(rows[0])
        messages = [dist.P2POp(dist.isend, rows[(rank - step - 1) % world_size], (rank + 1) % world_size)]
        messages.append(dist.P2POp(dist.irecv, arriving, (rank - 1) % world_size))
        for handle in dist.batch_isend_irecv(messages):
            handle.wait()
        rows[(rank - step - 2) % world_size] += arriving
    return rows[rank]


# %% check_reduce_scatter | waits for the first handle alone | messages and waited for
def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    for step in range(world_size - 1):
        home = tensor[pieces[(rank - step - 2) % world_size]]
        arriving = torch.empty_like(home)
        outgoing = tensor[pieces[(rank - step - 1) % world_size]]
        messages = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)]
        messages.append(dist.P2POp(dist.irecv, arriving, (rank - 1) % world_size))
        dist.batch_isend_irecv(messages)[0].wait()
        home += arriving
    return tensor[pieces[rank]]


# %% check_reduce_scatter | keeps a clone of the tensor (silver, no gold) | a second one of full size
def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    original = tensor.clone()
    for step in range(world_size - 1):
        out, into = pieces[(rank - step - 1) % world_size], pieces[(rank - step - 2) % world_size]
        if rank % 2 == 0:
            dist.send(tensor[out], (rank + 1) % world_size)
            dist.recv(tensor[into], (rank - 1) % world_size)
        else:
            dist.recv(tensor[into], (rank - 1) % world_size)
            dist.send(tensor[out], (rank + 1) % world_size)
        tensor[into] += original[into]
    return tensor[pieces[rank]]


# %% check_reduce_scatter | goes half the rounds each way | sends to several others
def my_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), world_size)
    total = tensor[pieces[rank]].clone()
    for direction, rounds in ((1, world_size // 2), (-1, (world_size - 1) // 2)):
        for step in range(rounds, 0, -1):
            out = tensor[pieces[(rank + direction * step) % world_size]]
            home = tensor[pieces[(rank + direction * (step - 1)) % world_size]]
            arriving = torch.empty_like(home)
            messages = [dist.P2POp(dist.isend, out, (rank + direction) % world_size)]
            messages.append(dist.P2POp(dist.irecv, arriving, (rank - direction) % world_size))
            for handle in dist.batch_isend_irecv(messages):
                handle.wait()
            if step > 1:
                home += arriving
            else:
                total += arriving
    return total


# %% check_all_reduce | only rank 0 has the sum | It is sent to nobody
def my_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.send(tensor, dst=0)
        return tensor
    arriving = torch.empty_like(tensor)
    for other in range(1, world_size):
        dist.recv(arriving, src=other)
        tensor += arriving
    return tensor


# %% check_all_reduce | passes on the growing sum | counted again and again
def my_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for _ in range(world_size - 1):
        arriving = torch.empty_like(tensor)
        messages = [dist.P2POp(dist.isend, tensor.clone(), (rank + 1) % world_size)]
        messages.append(dist.P2POp(dist.irecv, arriving, (rank - 1) % world_size))
        for handle in dist.batch_isend_irecv(messages):
            handle.wait()
        tensor += arriving
    return tensor


# %% check_all_reduce | swaps with rank ^ distance, so three ranks do not work | a power of two
def my_all_reduce(tensor):
    rank, world_size, distance = dist.get_rank(), dist.get_world_size(), 1
    while distance < world_size:
        peer, arriving = rank ^ distance, torch.empty_like(tensor)
        if peer < world_size:
            messages = [dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.irecv, arriving, peer)]
            for handle in dist.batch_isend_irecv(messages):
                handle.wait()
            tensor += arriving
        distance *= 2
    return tensor
