"""The public data sets that `qualms data` can fetch, so that it is advised for these alone."""

SOURCES = {
    "mnist": "MNIST",
    "fashion_mnist": "FashionMNIST",
    "kmnist": "KMNIST",
    "omniglot": "Omniglot",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "svhn": "SVHN",
}
"""torchvision's class of each"""
