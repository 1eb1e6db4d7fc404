"""Operators: what an ATen operator is, whatever the machine and whatever the plan.

Who teaches Shardwright an operator finds all of it here, in one table per question:

* ``splitting``: which dims it has and how they may be split (``rules``, one line per kind), and which
  of them counts samples.
* ``derivatives``: which results share storage, and whose gradients are each other's.
* ``keeping``: what autograd keeps of it until backward, and what forward and backward need for a
  moment besides.
* ``counting``: its products, flops and the tensors that pass through memory.

Capture, planner and runtime ask these tables. What takes seconds depends on a device and is priced in
``planner.cost``; which of the legal splits is wise, in ``planner.space`` and above. No torch here.
"""
