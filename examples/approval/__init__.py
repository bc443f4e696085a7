"""An order with approval: durable steps, a sleep, a signal with a timeout, and children."""
