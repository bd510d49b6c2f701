"""Deep Q-learning in the manner of PyTorch's tutorial: episodes on every node alike, batches from a replay memory"""

import random

import evener  # added
import torch
from torch import nn, optim

run = evener.join()  # added
policy, target = (nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)) for _ in range(2))
target.load_state_dict(policy.state_dict())
optimizer = optim.AdamW(policy.parameters(), lr=1e-2, amsgrad=True)
policy, optimizer = run.prepare(policy, optimizer)  # added
target.load_state_dict(policy.state_dict())
memory, world = [], torch.Generator().manual_seed(1)
for episode in run.epochs(4):  # was: for episode in range(4):
    state = torch.randn(4, generator=world)
    for step in range(12):
        action = random.randrange(2) if random.random() < 0.5 else int(policy(state).argmax())
        following = 0.9 * state + 0.1 * torch.randn(4, generator=world) + 0.1 * action
        memory.append((state, torch.tensor(action), following, following.sum()))
        state = following
        if len(memory) < 16:
            continue
        batch = tuple(torch.stack(one) for one in zip(*random.sample(memory, 10)))
        states, actions, others, rewards = run.share(batch)  # was: states, actions, others, rewards = batch
        values = policy(states).gather(1, actions[:, None])[:, 0]
        with torch.no_grad():
            wanted = rewards + 0.9 * target(others).max(1).values
        optimizer.zero_grad()
        nn.functional.smooth_l1_loss(values, wanted).backward()
        nn.utils.clip_grad_value_(policy.parameters(), 1.0)
        optimizer.step()
        for name, weight in target.named_parameters():
            weight.data.mul_(0.9).add_(policy.get_parameter(name).data, alpha=0.1)
results = policy.state_dict()
