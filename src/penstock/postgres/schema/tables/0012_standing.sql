-- Pools: bounds of what grows.

-- A member says for which of its standing jobs it takes messages, and how many.

drop function if exists penstock.take_messages(text, text);

-- Old starts of keys are found whatever their key.
create index key_starts_ends_at on penstock.key_starts (name, ends_at);
