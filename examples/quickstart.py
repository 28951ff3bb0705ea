"""One rollout and four updates with TROLL on a toy model: logits in, loss out, the token KL before and after."""

import torch

import troll

torch.manual_seed(0)
B, T, H, V = 8, 16, 32, 100  # sequences, tokens, hidden size, vocabulary
hidden = torch.randn(B, T, H)
head = torch.nn.Linear(H, V)
torch.nn.init.normal_(head.weight, std=0.5)
optimizer = torch.optim.SGD(head.parameters(), lr=2.0)

with torch.no_grad():  # the rollout: sample, and keep what the old policy said
    logits = head(hidden)
    sampled = torch.distributions.Categorical(logits=logits).sample()
    old = troll.sparsify(logits, sampled)
rewards = (sampled < V // 2).float().mean(-1)  # a reward for tokens of the lower half
advantages = troll.advantages.grpo(rewards, group_size=4)  # two prompts, four samples each
loss_mask = torch.ones(B, T, dtype=torch.bool)

for update in range(4):
    proposal = troll.restrict(head(hidden), old)
    loss, metrics = troll.troll_loss(proposal, old, advantages, loss_mask, kl_bound=0.05)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(
        f"update {update}: loss {loss.item():+.4f}, projected {metrics['projected_fraction']:.0%} of the tokens, "
        f"largest token KL {metrics['kl_before/max']:.4f} before and {metrics['kl_after/max']:.4f} after projection"
    )
