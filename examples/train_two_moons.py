"""Train a one-step generator on two moons and print the drift: python examples/train_two_moons.py"""

import torch

import driftgen as dg

torch.manual_seed(0)
data, net = dg.data.toy.get_toy("two-moons"), dg.generators.MLP(noise_dim=32, data_dim=2)
loss = dg.DriftingLoss(temperatures=(0.1, 0.2, 0.5))
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.9, 0.95))
for step in range(1000):
    out = loss(net(torch.randn(256, 32)), data.sample(256))  # generated samples are their own negatives
    optimizer.zero_grad()
    out.loss.backward()  # flat by design, since drifts are normalized ...
    optimizer.step()
    if step % 100 == 0:
        print(step, *(f"{d:.1e}" for d in out.drift))  # ... so watch this: it falls toward equilibrium
