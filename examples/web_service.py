"""An asyncio web service that publishes: POST /orders answers when the order is stored.

    pip install 'magnetar' uvicorn
    uvicorn web_service:app --app-dir examples
    curl -X POST localhost:8000/orders -H 'content-type: application/json' \
         -d '{"customer": "c-17", "item": "telescope", "quantity": 2}'

One client and one producer serve all requests: orders that arrive together travel in one batch.
"""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field

import magnetar
import magnetar.asyncio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SERVICE_URL = os.environ.get("MAGNETAR_SERVICE_URL", "grpc://localhost:6660")


class Order(BaseModel):
    customer: str = Field(max_length=100)
    item: str = Field(max_length=100)
    quantity: int = Field(ge=1)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with magnetar.asyncio.Client(SERVICE_URL) as client:
        app.state.producer = await client.create_producer("orders")
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=201)
async def place(order: Order) -> dict[str, str]:
    producer: magnetar.asyncio.Producer = app.state.producer
    try:
        # The customer is the key: the orders of one customer stay in order.
        message_id = await producer.send(
            order.model_dump_json().encode(), partition_key=order.customer
        )
    except magnetar.PulsarException as error:
        raise HTTPException(503, f"no receipt for the order: {error}") from error
    return {"message_id": str(message_id)}
