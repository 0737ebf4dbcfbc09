// Templates to begin with.

export const EXAMPLES = [
  { name: "a constructor", template: `class Point:
    def __init__(self, x, y):
        self.x = x
        [[?12]]

    def norm(self):
        return (self.x ** 2 + self.y ** 2) ** 0.5
` },
  { name: "a method", template: `class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        [[?16]]

    def pop(self):
        return self.items.pop()
` },
  { name: "two holes", template: `class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        [[?12]]

    def deposit(self, amount):
        [[?16]]
        return self.balance
` },
  { name: "a loop", template: `def mean(values):
    total = 0
    for value in values:
        [[?12]]
    return total / len(values)
` },
];
