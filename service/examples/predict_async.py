"""The same with asyncio, for files that arrive one by one: python predict_async.py URL FILE..."""

import asyncio
import sys

import qualms


async def main(url: str, *files: str) -> None:
    """One client for all tasks; each call has 10 seconds, its retries included."""
    async with qualms.AsyncClient(url) as client:
        results = await asyncio.gather(*(client.predict(file, timeout=10) for file in files))
        for file, result in zip(files, results, strict=True):
            print(file, "class", result.prediction.label, "flag", result.ood.flag, "accept", result.trust.accept)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
