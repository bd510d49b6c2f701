"""A DCGAN in the manner of PyTorch's example: two models, two optimisers, several backward passes a step."""

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import evener  # added

run = evener.join()  # added
netG = nn.Sequential(
    nn.ConvTranspose2d(4, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(True), nn.ConvTranspose2d(8, 1, 4, 2), nn.Tanh()
)
netD = nn.Sequential(
    nn.Conv2d(1, 8, 4, 2),
    nn.LeakyReLU(0.2),
    nn.Conv2d(8, 8, 3, bias=False),
    nn.BatchNorm2d(8),
    nn.LeakyReLU(0.2),
    nn.Flatten(),
    nn.Linear(8, 1),
    nn.Sigmoid(),
)
criterion = nn.BCELoss()
optimizerD = optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
dataset = TensorDataset(torch.randn(50, 1, 8, 8), torch.randn(50, 4, 1, 1))
dataloader = DataLoader(dataset, batch_size=11, shuffle=True)
netG, netD, optimizerG, optimizerD, dataloader = run.prepare(netG, netD, optimizerG, optimizerD, dataloader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for real, noise in dataloader:
        netD.zero_grad()
        label = torch.full((real.size(0),), 1.0)
        errD_real = criterion(netD(real).view(-1), label)
        errD_real.backward()
        fake = netG(noise)
        label.fill_(0.0)
        errD_fake = criterion(netD(fake.detach()).view(-1), label)
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        label.fill_(1.0)
        errG = criterion(netD(fake).view(-1), label)
        errG.backward()
        optimizerG.step()
results = {**{"G." + k: v for k, v in netG.state_dict().items()}, **netD.state_dict()}
