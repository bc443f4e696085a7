-- A member says for which of its standing jobs it takes messages, and how many.

drop function if exists penstock.take_messages(text, text);
